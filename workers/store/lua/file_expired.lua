-- Forget some of the files whose time is over, and return their ids. One that an unfinished batch reads is kept for another
-- minute.
local gone = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', FILES .. ':expire', '-inf', ms(now_ms()), 'LIMIT', 0, ARGV[1])) do
  local owner, purpose, bytes, readers = unpack(
    redis.call('HMGET', file_key(id), 'owner', 'purpose', 'bytes', 'readers'))
  if number(readers) > 0 then
    redis.call('ZADD', FILES .. ':expire', ms(now_ms() + 60000), id)
  else
    forget_file(id, owner, purpose, bytes)
    gone[#gone + 1] = id
  end
end
return gone
