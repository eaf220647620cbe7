-- Store a key: its fields, and its entry in the list.
redis.call('HSET', 'reasoner:key:' .. ARGV[1], unpack(ARGV, 2))
redis.call('ZADD', 'reasoner:keys', redis.call('INCR', 'reasoner:submitted:keys'), ARGV[1])
