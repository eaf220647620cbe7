-- Renew the worker's lease; return its state, including a cancellation by the client.
local id, token, lease = unpack(ARGV)
local status, current, cancel = unpack(redis.call('HMGET', job_key(id), 'status', 'token', 'cancel'))
if status ~= 'in_progress' or current ~= token then
  return 'lost'
end
renew(id, lease)
return cancel and 'cancel' or 'ok'
