-- Delete a job that has ended. Return 'moving' if the archive may have it, too.
local id = ARGV[1]
local status = redis.call('HGET', job_key(id), 'status')
if not status then
  return 'gone'
elseif status == 'queued' or status == 'in_progress' then
  return 'active'
end
delete_job(id)
return redis.call('HEXISTS', ARCHIVING, id) == 1 and 'moving' or 'ok'
