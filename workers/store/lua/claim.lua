-- Claim jobs for a worker, one for each id. If `by_turn` is 1, a message of the job has woken the worker: it gets the
-- job if another one has lost it, and else the one whose turn it is in the same queue. The returned tokens fence off all
-- earlier workers.
local lease, max_attempts, worker, by_turn = unpack(ARGV)
local now = now_ms()
detect_outage(now)

-- Return true if a job may start; otherwise end it.
local function may_start(candidate)
  local cancel, stalled = unpack(redis.call('HMGET', job_key(candidate), 'cancel', 'stalled'))
  if cancel then
    finish_cancelled(candidate)
  elseif number(stalled) >= tonumber(max_attempts) then
    fail_poison_job(candidate, number(stalled))
  elseif number(redis.call('ZSCORE', DEADLINES, candidate) or now + 1) <= now then
    fail_expired_job(candidate)
  else
    return true
  end
end

-- Return why a job cannot be claimed, or nothing.
local function find_obstacle(candidate)
  local status, expires, share = unpack(redis.call('HMGET', job_key(candidate), 'status', 'lease', 'share'))
  if not status then
    return 'gone'
  elseif status == 'in_progress' and number(expires) > now then
    return 'held'
  elseif status ~= 'queued' and status ~= 'in_progress' then
    return 'ended'
  elseif share == 'waiting' then
    return 'waiting' -- until a grant from its batch wakes it
  end
end

local function claim(id)
  local queue, status = unpack(redis.call('HMGET', job_key(id), 'priority', 'status'))
  local obstacle = find_obstacle(id)
  if by_turn == '1' and queue then
    redis.call('HINCRBY', SENT, queue .. ':claimed', 1)
    if obstacle or status == 'queued' then
      repeat
        id = find_next(queue)
      until not id or may_start(id)
      obstacle = not id and 'none' or nil
    end
  end
  if obstacle then
    return { obstacle }
  elseif not may_start(id) then
    return { 'ended' }
  end

  local job = job_key(id)
  local before, waiting, share = unpack(redis.call('HMGET', job, 'status', 'waiting', 'share'))
  if before == 'in_progress' then
    redis.call('HINCRBY', STATS, 'lease_reclaims', 1)
  else
    count_start(queue, now)
  end
  charge_start(id)
  local attempt = begin_attempt(id)
  local token = redis.call('HINCRBY', job, 'token', 1)
  local first = redis.call('HSETNX', job, 'started', seconds(now)) == 1
  if first then
    redis.call('ZREM', DEADLINES, id)
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
  return { 'claimed', id, token, attempt, owner, spec, origin, redis.call('EXISTS', job .. ':keys'), granted, share }
end

local claims = {}
for position = 5, #ARGV do
  claims[#claims + 1] = claim(ARGV[position])
end
return claims
