-- Return the jobs of one owner ('' for all), newest first, that were submitted before the job `after`.
local owner, after, limit, status = unpack(ARGV)
local all = owner == '' and JOBS or owned(owner)
local highest = '+inf'
if after ~= '' then
  local n = redis.call('ZSCORE', all, after)
  if not n then
    return false
  end
  highest = '(' .. n
end
local index = status == '' and all or all .. ':' .. status
local jobs = {}
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', index, highest, '-inf', 'LIMIT', 0, limit)) do
  jobs[#jobs + 1] = redis.call('HGETALL', job_key(id))
end
return jobs
