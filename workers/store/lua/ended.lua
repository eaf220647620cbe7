-- Return the ids of the jobs of one owner ('' for all) that ended between two times (ms), each with its time, oldest
-- first.
local owner, lowest, highest, limit = unpack(ARGV)
local index = (owner == '' and JOBS or owned(owner)) .. ':ended'
return redis.call('ZRANGEBYSCORE', index, lowest, highest, 'WITHSCORES', 'LIMIT', 0, limit)
