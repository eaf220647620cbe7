-- An engine answers: jobs that wait for one are due now. Answers how many they are; a job that has gone on by itself, or
-- has ended, is not among them.
local now, woken = now_ms(), 0
for _, id in ipairs(redis.call('SMEMBERS', WAITING)) do
  local status, waiting = unpack(redis.call('HMGET', job_key(id), 'status', 'waiting'))
  if status == 'queued' and waiting then
    look_at(id, now)
    woken = woken + 1
  end
end
redis.call('DEL', WAITING)
return woken
