-- Let the numbers of new jobs begin behind `highest`, the highest one in the archive.
local highest = tonumber(ARGV[1])
if number(redis.call('GET', 'reasoner:submitted')) < highest then
  redis.call('SET', 'reasoner:submitted', ms(highest))
end
return 1
