-- Forget a file, unless an unfinished batch reads it.
local id = ARGV[1]
local owner, purpose, bytes, readers = unpack(redis.call('HMGET', file_key(id), 'owner', 'purpose', 'bytes', 'readers'))
if not owner then
  return 'gone'
elseif number(readers) > 0 then
  return 'used'
end
for _, index in ipairs(file_indexes(owner, purpose)) do
  redis.call('ZREM', index, id)
end
redis.call('ZREM', FILES .. ':expire', id)
redis.call('HINCRBY', FILES .. ':bytes', owner, ms(0 - number(bytes))) -- Lua writes the negative of 0 as -0
redis.call('DEL', file_key(id))
return 'ok'
