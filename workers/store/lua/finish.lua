-- End a job once, by its worker.
local id, token, status, result, failure = unpack(ARGV)
local now_status, current = unpack(redis.call('HMGET', job_key(id), 'status', 'token'))
if now_status ~= 'in_progress' or current ~= token then
  return 'lost'
end
finish(id, status, result, failure)
return 'ok'
