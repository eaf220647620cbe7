-- Return the jobs of a batch, each as its id, status ('' for one that is not here), result, granted tokens and the spent
-- ones of both kinds. In one script: a thousand round trips took longer than the submission of as many jobs.
local jobs = {}
for _, id in ipairs(redis.call('LRANGE', batch_key(ARGV[1]) .. ':jobs', 0, -1)) do
  local status, result, granted, generated, verified = unpack(redis.call(
    'HMGET', job_key(id), 'status', 'result', 'granted', 'usage:generated', 'usage:verifier_computed'))
  jobs[#jobs + 1] = { id, status or '', result or '', granted or '0', generated or '0', verified or '0' }
end
return jobs
