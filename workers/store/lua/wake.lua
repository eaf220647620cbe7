-- Make the jobs that wait for an engine ready, since one answers. Return their number, without those that continued
-- or ended meanwhile.
local woken = 0
for _, id in ipairs(redis.call('SMEMBERS', WAITING)) do
  local status, waiting = unpack(redis.call('HMGET', job_key(id), 'status', 'waiting'))
  if status == 'queued' and waiting then
    make_ready(id)
    woken = woken + 1
  end
end
redis.call('DEL', WAITING)
return woken
