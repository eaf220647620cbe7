-- Cancels: a waiting job at once, a running one through its owner, who hears of it with its next commit or heartbeat.
local id = ARGV[1]
local status = redis.call('HGET', job_key(id), 'status')
if not status then
  return 'gone'
elseif status == 'queued' then
  finish(id, 'cancelled', 'null', 'null')
elseif status == 'in_progress' then
  redis.call('HSET', job_key(id), 'cancel', 1)
end
return 'ok'
