-- Delete jobs that ended longer ago than the retention time; return their number.
local keep, limit = unpack(ARGV)
local old = redis.call('ZRANGEBYSCORE', JOBS .. ':ended', '-inf', ms(now_ms() - keep), 'LIMIT', 0, limit)
for _, id in ipairs(old) do
  delete_job(id)
end
return #old
