-- Return the hashes of those of these jobs that are here; of one that was deleted while it was moved to the archive, its id
-- alone: its row there is removed by the next pass.
local jobs = {}
for _, id in ipairs(ARGV) do
  local fields = redis.call('HGETALL', job_key(id))
  if #fields > 0 then
    jobs[#jobs + 1] = fields
  elseif redis.call('HEXISTS', ARCHIVING, id) == 1 then
    jobs[#jobs + 1] = { 'id', id }
  end
end
return jobs
