-- Return the jobs of a batch that still exist, each as its id, status, result, granted tokens and the spent ones of both
-- kinds. In one script: a thousand round trips took longer than the submission of as many jobs.
local jobs = {}
for _, id in ipairs(redis.call('LRANGE', batch_key(ARGV[1]) .. ':jobs', 0, -1)) do
  local status, result, granted, generated, verified = unpack(redis.call(
    'HMGET', job_key(id), 'status', 'result', 'granted', 'usage:generated', 'usage:verifier_computed'))
  if status then
    jobs[#jobs + 1] = { id, status, result or '', granted, generated or '0', verified or '0' }
  end
end
return jobs
