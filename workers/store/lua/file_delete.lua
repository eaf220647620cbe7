-- Forget a file, unless an unfinished batch reads it.
local id = ARGV[1]
local owner, purpose, bytes, readers = unpack(redis.call('HMGET', file_key(id), 'owner', 'purpose', 'bytes', 'readers'))
if not owner then
  return 'gone'
elseif number(readers) > 0 then
  return 'used'
end
forget_file(id, owner, purpose, bytes)
return 'ok'
