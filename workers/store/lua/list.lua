-- Return the jobs of one owner ('' for all), newest first, that were submitted before the position `before` ('' for none).
local owner, before, limit, status = unpack(ARGV)
local all = owner == '' and JOBS or owned(owner)
local highest = before == '' and '+inf' or '(' .. before
local index = status == '' and all or all .. ':' .. status
local jobs = {}
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', index, highest, '-inf', 'LIMIT', 0, limit)) do
  jobs[#jobs + 1] = redis.call('HGETALL', job_key(id))
end
return jobs
