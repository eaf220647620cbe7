-- Make the jobs that wait for an engine due now, since one answers. Return their number, without those that continued
-- or ended meanwhile.
local now, woken = now_ms(), 0
for _, id in ipairs(redis.call('SMEMBERS', WAITING)) do
  local status, waiting = unpack(redis.call('HMGET', job_key(id), 'status', 'waiting'))
  if status == 'queued' and waiting then
    schedule_check(id, now)
    woken = woken + 1
  end
end
redis.call('DEL', WAITING)
return woken
