-- Cancels: a waiting job at once, a running one through its owner, who hears of it with its next commit or heartbeat.
return cancel(ARGV[1], ARGV[2])
