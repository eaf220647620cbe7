-- Release a job: it is queued again, after a delay, and its attempt is not counted. The delay doubles with each release
-- in a row that found no engine, up to 8 times: the watch wakes the job as soon as one answers.
local id, token, delay, reason, detail = unpack(ARGV)
local job = job_key(id)
local status, current, cancel, waiting = unpack(redis.call('HMGET', job, 'status', 'token', 'cancel', 'waiting'))
if status ~= 'in_progress' or current ~= token then
  return 'lost'
end
if cancel then
  finish_cancelled(id)
  return 'ok'
end
uncount_attempt(id)
redis.call('HSET', job, 'lease', 0)
redis.call('HDEL', job, 'sent')
set_status(id, 'queued')
if reason == 'engine_unavailable' then
  delay = delay * 2 ^ math.min(redis.call('HINCRBY', job, 'away', 1) - 1, 3)
end
schedule_check(id, now_ms() + delay)
if reason == 'engine_unavailable' or reason == 'engine_busy' then
  if reason == 'engine_unavailable' then
    redis.call('SADD', WAITING, id)
  end
  if waiting then
    return 'ok'
  end
  redis.call('HSET', job, 'waiting', reason)
end
append(id, 'job.queued', cjson.encode({ reason = reason, detail = detail }))
return 'ok'
