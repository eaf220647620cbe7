-- Append entries to the journal and their spend to the usage. Entries whose key is in the journal are not written
-- again, so a commit whose response was lost can be repeated. A commit renews the lease like a heartbeat.
local id, token, lease = ARGV[1], ARGV[2], ARGV[3]
local job = job_key(id)
local status, current, cancel, waiting, attempt, batch = unpack(
  redis.call('HMGET', job, 'status', 'token', 'cancel', 'waiting', 'attempt', 'batch'))
if status ~= 'in_progress' or current ~= token then
  return 'lost'
end
renew(id, lease)
-- Tokens that nobody could use are no progress: a server that breaks off each answer would keep the job for ever.
local function has_progress()
  for i = 4, #ARGV, 5 do
    if ARGV[i + 1] ~= 'lost' and redis.call('SISMEMBER', job .. ':keys', ARGV[i]) == 0 then
      return true
    end
  end
end
if waiting and has_progress() then
  forget_wait(id)
  append(id, 'job.resumed', '{"attempt":' .. attempt .. '}')
end
for i = 4, #ARGV, 5 do
  local key, kind, data, elapsed, spend = unpack(ARGV, i, i + 4)
  if redis.call('SADD', job .. ':keys', key) == 1 then
    redis.call('HSET', job, 'stalled', 0)
    append(id, kind, data, 'key', key, 'elapsed', elapsed, 'spend', spend)
    for name, value in pairs(cjson.decode(spend)) do
      local amount = string.format('%.17g', value)
      redis.call('HINCRBYFLOAT', job, 'usage:' .. name, amount)
      redis.call('HINCRBYFLOAT', STATS, 'usage:' .. name, amount)
      if batch then
        redis.call('HINCRBYFLOAT', batch_key(batch), 'usage:' .. name, amount)
      end
    end
  end
end
return cancel and 'cancel' or 'ok'
