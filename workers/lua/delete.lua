-- Forgets a job that has ended.
local id = ARGV[1]
local status, n = unpack(redis.call('HMGET', job_key(id), 'status', 'n'))
if not status then
  return 'gone'
elseif status == 'queued' or status == 'in_progress' then
  return 'active'
end
redis.call('ZREM', JOBS, id)
redis.call('ZREM', JOBS .. ':' .. status, id)
redis.call('DEL', job_key(id), job_key(id) .. ':log')
return 'ok'
