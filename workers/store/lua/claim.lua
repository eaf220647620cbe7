-- Claim a job for a worker. The returned token fences off all earlier workers.
local id, lease, max_attempts, worker = unpack(ARGV)
local job = job_key(id)
local now = now_ms()
detect_outage(now)
local status, expires, stalled, cancel, waiting, share = unpack(
  redis.call('HMGET', job, 'status', 'lease', 'stalled', 'cancel', 'waiting', 'share'))

if not status then
  return { 'gone' }
elseif status == 'in_progress' and number(expires) > now then
  return { 'held' }
elseif status ~= 'queued' and status ~= 'in_progress' then
  return { 'ended' }
elseif share == 'waiting' then
  return { 'waiting' } -- until a grant from its batch wakes it
elseif cancel then
  finish_cancelled(id)
  return { 'ended' }
elseif number(stalled) >= tonumber(max_attempts) then
  fail_poison_job(id, number(stalled))
  return { 'ended' }
end
if status == 'in_progress' then
  redis.call('HINCRBY', STATS, 'lease_reclaims', 1)
end
local attempt = begin_attempt(id)
local token = redis.call('HINCRBY', job, 'token', 1)
local first = redis.call('HSETNX', job, 'started', seconds(now)) == 1
if first then
  count_time(id, 'queue_wait', now)
end
redis.call('HSET', job, 'worker', worker)
set_status(id, 'in_progress')
renew(id, lease)
-- A job that waits for its engine is claimed repeatedly; its stream reports that once.
if not waiting then
  append(id, first and 'job.started' or 'job.resumed', '{"attempt":' .. attempt .. '}')
end
local owner, spec, origin, granted = unpack(redis.call('HMGET', job, 'owner', 'spec', 'origin', 'granted'))
return { 'claimed', token, attempt, owner, spec, origin, redis.call('EXISTS', job .. ':keys'), granted, share }
