-- Submit the next lines of a batch: for each its job, spec, priority, form, and the position behind it in the file; no
-- spec if the line cannot become a job, with the reason (JSON) instead of the form, unless that is recorded. Stop at the
-- first line for which there is no room, or not yet. Return what stopped it, and the number of lines that were taken.
local batch, token, from, cap, quota = unpack(ARGV, 1, 5)
local key, now = batch_key(batch), now_ms()
if not holds_batch(batch, token) then
  return { 'lost', 0 }
end
local owner, origin, fed, closing, share, floor = unpack(
  redis.call('HMGET', key, 'owner', 'origin', 'fed', 'closing', 'line_share', 'line_floor'))
if fed ~= from or closing then
  return { 'closed', 0 }
end
local index, taken = tonumber(string.match(fed, '^%d+')), 0
for i = 6, #ARGV, 5 do
  local id, spec, priority, form, position = unpack(ARGV, i, i + 4)
  if spec == '' then
    if form ~= '' then
      redis.call('HSET', key .. ':refused', index, form)
    end
    if share and form ~= '' then
      redis.call('HINCRBY', key, 'pool', share)
    end
  else
    if redis.call('ZCARD', JOBS .. ':queued') >= tonumber(cap) then
      return { 'full', taken }
    end
    local refusal = reserve_quota(job_key(id), owner, quota, 1, cjson.decode(spec).budget, now)
    if refusal then
      return { refusal[1], taken }
    end
    record(id, spec, priority, owner, origin, now)
    redis.call('HSET', job_key(id), 'batch', batch)
    if form ~= '' then
      redis.call('HSET', job_key(id), 'form', form)
    end
    redis.call('ZADD', key .. ':open', index, id)
    redis.call('HINCRBY', key, 'running', 1)
    redis.call('HINCRBY', key, 'count:queued', 1)
    if share then
      redis.call('HSET', job_key(id), 'granted', floor, 'share', 'floor')
      redis.call('HINCRBY', key, 'pool', share - floor)
      redis.call('HINCRBY', key, 'floors', 1)
    end
  end
  index, taken = index + 1, taken + 1
  redis.call('HSET', key, 'fed', position)
end
return { 'ok', taken }
