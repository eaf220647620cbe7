-- Jobs, newest first, that were submitted before the job `after`.
local after, limit, status = unpack(ARGV)
local highest = '+inf'
if after ~= '' then
  local n = redis.call('ZSCORE', JOBS, after)
  if not n then
    return false
  end
  highest = '(' .. n
end
local index = status == '' and JOBS or JOBS .. ':' .. status
local jobs = {}
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', index, highest, '-inf', 'LIMIT', 0, limit)) do
  jobs[#jobs + 1] = redis.call('HGETALL', job_key(id))
end
return jobs
