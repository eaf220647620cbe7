-- Count the jobs of each queue: those that could start now, and those that run.
local counts = {}
for _, queue in ipairs({ 'interactive', 'batch' }) do
  counts[queue] = { queue, 0, 0 }
  for _, owner in ipairs(redis.call('ZRANGE', shares_key(queue), 0, -1)) do
    counts[queue][2] = counts[queue][2] + redis.call('ZCARD', ready_key(queue, owner))
  end
end
for _, id in ipairs(redis.call('ZRANGE', JOBS .. ':in_progress', 0, -1)) do
  local row = counts[redis.call('HGET', job_key(id), 'priority')]
  row[3] = row[3] + 1
end
return { counts.interactive, counts.batch }
