-- Return the hashes of those of these jobs that are here.
local jobs = {}
for _, id in ipairs(ARGV) do
  local fields = redis.call('HGETALL', job_key(id))
  if #fields > 0 then
    jobs[#jobs + 1] = fields
  end
end
return jobs
