-- Release the room that was reserved for an upload.
local owner, id, bytes = unpack(ARGV)
redis.call('ZREM', FILES .. ':arriving:' .. owner, id .. ':' .. bytes)
