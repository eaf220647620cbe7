-- Begin a pass that moves jobs to the archive: hold the right to do so until the pass is settled, for a term (ms) at most,
-- and mark jobs that ended `age` ms ago or earlier and whose webhook is settled. Those that an earlier pass left come
-- first: it was cut off, or they changed meanwhile. Return the pass and the ids; false while another process holds the
-- right.
local holder, term, age, limit = unpack(ARGV)
local now = now_ms()
local current, till = unpack(redis.call('HMGET', ARCHIVER, 'holder', 'till'))
if current and current ~= holder and number(till) > now then
  return false
end
local ids, start = {}, 0
for _, id in ipairs(redis.call('HKEYS', ARCHIVING)) do
  if #ids < tonumber(limit) then
    ids[#ids + 1] = id
  end
end
while #ids < tonumber(limit) and start < 10000 do
  local page = redis.call('ZRANGEBYSCORE', JOBS .. ':ended', '-inf', ms(now - age), 'LIMIT', start, limit)
  if #page == 0 then
    break
  end
  for _, id in ipairs(page) do
    if #ids < tonumber(limit) and redis.call('HEXISTS', ARCHIVING, id) == 0 and not redis.call('ZSCORE', WEBHOOKS, id) then
      ids[#ids + 1] = id
    end
  end
  start = start + #page
end
if #ids == 0 then
  redis.call('HDEL', ARCHIVER, 'holder', 'till')
  return { '' }
end
-- The time keeps the numbers rising after Redis has lost its data.
local pass = ms(math.max(number(redis.call('HGET', ARCHIVER, 'pass')) + 1, now))
redis.call('HSET', ARCHIVER, 'holder', holder, 'till', ms(now + term), 'pass', pass)
for _, id in ipairs(ids) do
  redis.call('HSET', ARCHIVING, id, pass)
end
return { pass, unpack(ids) }
