-- Return some of the files whose time is over. One that an unfinished batch reads is kept for another minute.
local due = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', FILES .. ':expire', '-inf', ms(now_ms()), 'LIMIT', 0, ARGV[1])) do
  if number(redis.call('HGET', file_key(id), 'readers')) > 0 then
    redis.call('ZADD', FILES .. ':expire', ms(now_ms() + 60000), id)
  else
    due[#due + 1] = id
  end
end
return due
