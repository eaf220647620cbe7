-- Gives a job to one worker. The token it answers fences off every earlier owner.
local id, lease, max_attempts, worker = unpack(ARGV)
local job = job_key(id)
local now = now_ms()
local status, expires, attempt, cancel, waiting, share = unpack(
  redis.call('HMGET', job, 'status', 'lease', 'attempt', 'cancel', 'waiting', 'share'))

if not status then
  return { 'gone' }
elseif status == 'in_progress' and number(expires) > now then
  return { 'held' }
elseif status ~= 'queued' and status ~= 'in_progress' then
  return { 'ended' }
elseif share == 'waiting' then
  return { 'waiting' } -- for its batch: the grant that it asked for wakes it
elseif cancel then
  finish(id, 'cancelled', 'null', 'null')
  return { 'ended' }
elseif number(attempt) >= tonumber(max_attempts) then
  give_up(id, number(attempt))
  return { 'ended' }
end
if status == 'in_progress' then
  redis.call('HINCRBY', STATS, 'lease_reclaims', 1)
end
attempt = redis.call('HINCRBY', job, 'attempt', 1)
local token = redis.call('HINCRBY', job, 'token', 1)
local first = redis.call('HSETNX', job, 'started', seconds(now)) == 1
if first then
  count_time(id, 'queue_wait', now)
end
redis.call('HSET', job, 'lease', ms(now + lease), 'worker', worker)
set_status(id, 'in_progress')
look_at(id, now + lease)
-- A job that waits for its engine is claimed again and again; its stream says so once.
if not waiting then
  append(id, first and 'job.started' or 'job.resumed', '{"attempt":' .. attempt .. '}')
end
local owner, spec, origin, granted = unpack(redis.call('HMGET', job, 'owner', 'spec', 'origin', 'granted'))
return { 'claimed', token, attempt, owner, spec, origin, granted, share }
