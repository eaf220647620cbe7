-- Reserve room for an upload of an owner until a time in `term` (ms): `bytes`, or as many as there are up to `most` if its
-- length is not known (''). Return the bytes; of no room the bytes that the owner's files and uploads have.
local owner, id, bytes, most, cap, term = unpack(ARGV)
local now, key = now_ms(), FILES .. ':arriving:' .. owner
redis.call('ZREMRANGEBYSCORE', key, '-inf', ms(now))
local total = number(redis.call('HGET', FILES .. ':bytes', owner))
for _, upload in ipairs(redis.call('ZRANGE', key, 0, -1)) do
  total = total + number(string.match(upload, ':(%d+)$'))
end
local left = tonumber(cap) - total
local room = bytes == '' and math.min(left, tonumber(most)) or tonumber(bytes)
if left <= 0 or room > left then
  return { 'full', ms(total) }
end
redis.call('ZADD', key, ms(now + term), id .. ':' .. ms(room))
redis.call('PEXPIREAT', key, ms(now + term))
return { 'ok', ms(room) }
