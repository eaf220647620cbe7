-- Delete jobs, and batches of files, that ended longer ago than the retention time; return the number of jobs.
local keep, limit = unpack(ARGV)
local old = redis.call('ZRANGEBYSCORE', JOBS .. ':ended', '-inf', ms(now_ms() - keep), 'LIMIT', 0, limit)
for _, id in ipairs(old) do
  delete_job(id)
end
for _, batch in ipairs(redis.call('ZRANGEBYSCORE', ENDED_BATCHES, '-inf', ms(now_ms() - keep), 'LIMIT', 0, limit)) do
  delete_batch(batch, redis.call('HGET', batch_key(batch), 'owner'))
end
return #old
