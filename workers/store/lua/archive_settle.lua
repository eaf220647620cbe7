-- End a pass that moved jobs to the archive. The arguments after it are triples of a job and its seq and time of end as
-- they were read, '' if the job was gone or active, so that the archive must not have it. A job that has not changed
-- since is removed here; one that has stays marked, and the next pass decides. Gives up the right to move jobs.
local pass = ARGV[1]
local moved = 0
for i = 2, #ARGV, 3 do
  local id, seq, finished = unpack(ARGV, i, i + 2)
  if redis.call('HGET', ARCHIVING, id) == pass then -- otherwise another process has taken over
    local status, seq_now, finished_now, idempotency = unpack(
      redis.call('HMGET', job_key(id), 'status', 'seq', 'finished', 'idempotency'))
    local has_ended = status and status ~= 'queued' and status ~= 'in_progress'
    if seq == '' and not has_ended then
      redis.call('HDEL', ARCHIVING, id)
    elseif has_ended and seq == seq_now and finished == finished_now and not redis.call('ZSCORE', WEBHOOKS, id) then
      if idempotency and redis.call('HGET', idempotency, 'job') == id then
        redis.call('HSET', idempotency, 'archived', 1)
      end
      remove_job(id)
      redis.call('HDEL', ARCHIVING, id)
      moved = moved + 1
    end
  end
end
if redis.call('HGET', ARCHIVER, 'pass') == pass then
  redis.call('HDEL', ARCHIVER, 'holder', 'till')
end
redis.call('HINCRBY', STATS, 'archived', moved)
return moved
