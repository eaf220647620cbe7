-- Delete a job that has ended.
local id = ARGV[1]
local status = redis.call('HGET', job_key(id), 'status')
if not status then
  return 'gone'
elseif status == 'queued' or status == 'in_progress' then
  return 'active'
end
delete_job(id)
return 'ok'
