-- Release a job: it is queued again, after a delay, and its attempt is not counted. The delay doubles with each release
-- in a row that found no engine, up to 8 times: the watch wakes the job as soon as one answers. A job for which engines
-- did nothing for `patience` ms (0: without end), in several attempts, is not released: its worker ends it.
local MIN_RELEASES = 3
local id, token, delay, reason, detail, patience = unpack(ARGV)
local job = job_key(id)
local status, current, cancel, waiting, told = unpack(
  redis.call('HMGET', job, 'status', 'token', 'cancel', 'waiting', 'detail'))
if status ~= 'in_progress' or current ~= token then
  return { 'lost' }
end
if cancel then
  finish_cancelled(id)
  return { 'ok' }
end
local now = now_ms()
local is_away = reason == 'engine_unavailable'
if is_away or reason == 'engine_busy' then
  redis.call('HSETNX', job, 'unserved', ms(now))
  local releases = redis.call('HINCRBY', job, 'releases', 1)
  local waited, left = now - number(redis.call('HGET', job, 'unserved')), number(patience)
  if left > 0 and releases >= MIN_RELEASES and waited >= left then
    return { 'exhausted', releases, ms(waited) }
  end
  if is_away then
    delay = delay * 2 ^ math.min(redis.call('HINCRBY', job, 'away', 1) - 1, 3)
  end
  if left > 0 and waited < left then -- the last attempt is at the end of its patience
    delay = math.min(delay, left - waited)
  end
end
uncount_attempt(id)
redis.call('HSET', job, 'lease', 0)
set_status(id, 'queued')
if number(delay) > 0 then
  schedule_check(id, now + delay)
else
  make_ready(id)
end
if is_away or reason == 'engine_busy' then
  if is_away then
    redis.call('SADD', WAITING, id)
  end
  if waiting == reason and told == detail then
    return { 'ok' }
  end
  redis.call('HSET', job, 'waiting', reason, 'detail', detail)
end
append(id, 'job.queued', cjson.encode({ reason = reason, detail = detail }))
return { 'ok' }
