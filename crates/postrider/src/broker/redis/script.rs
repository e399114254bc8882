//! The scripts that read and move positions. Each looks first whether the caller still holds the shards.
//!
//! The hash of a consumer has the fields `holder:<shard>` (number of slots, epoch, and a token that every subscription
//! makes anew), `seen:<shard>` (the highest id that anybody was given) and `alive:<slots>:<slot>` (when its holder last
//! read, by Redis's clock).
//!
//! They may write while memory is full (`allow-oom`, known to Redis since 7.0): if consumers had to stop then, nothing would
//! ever be trimmed, and Redis would stay full.

use redis::{Script, Value};

/// A holder that has not read for this long is gone, whatever its epoch: a store that was made anew counts from the
/// beginning. Holders read at least every [`super::subscription::WAIT`].
pub(super) const HOLDER_GONE_MS: u64 = 30_000;

/// `KEYS`: the hash, then all shards. `ARGV`: group, slots, slot, epoch, token, time until a holder is gone. Makes the
/// groups, also those of other slots: what they have not done must not be trimmed. Answers 0, or 1 and for each shard of
/// the slot its position and what was seen.
const OPEN: &str = "#!lua flags=allow-oom\n\
    local group, slots, slot = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]) \
    local time = redis.call('TIME') \
    local now = time[1] * 1000 + math.floor(time[2] / 1000) \
    local alive = 'alive:' .. ARGV[2] .. ':' .. ARGV[3] \
    local at = tonumber(redis.call('HGET', KEYS[1], alive) or '0') \
    for i = 2, #KEYS do \
        local shard = i - 2 \
        local holder = shard % slots == slot and redis.call('HGET', KEYS[1], 'holder:' .. shard) \
        if holder then \
            local of, epoch = string.match(holder, '^(%d+) (%d+) ') \
            if of == ARGV[2] and tonumber(epoch) > tonumber(ARGV[4]) and now - at < tonumber(ARGV[6]) then \
                return {0} \
            end \
        end \
    end \
    redis.call('HSET', KEYS[1], alive, now) \
    local answer = {1} \
    for i = 2, #KEYS do \
        local shard = i - 2 \
        local position \
        if redis.call('EXISTS', KEYS[i]) == 1 then \
            for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[i])) do \
                local name, last \
                for f = 1, #info, 2 do \
                    if info[f] == 'name' then name = info[f + 1] end \
                    if info[f] == 'last-delivered-id' then last = info[f + 1] end \
                end \
                if name == group then position = last end \
            end \
        end \
        if not position then \
            redis.call('XGROUP', 'CREATE', KEYS[i], group, '0', 'MKSTREAM') \
            redis.call('HDEL', KEYS[1], 'seen:' .. shard) \
            position = '0-0' \
        end \
        if shard % slots == slot then \
            redis.call('HSET', KEYS[1], 'holder:' .. shard, ARGV[2] .. ' ' .. ARGV[4] .. ' ' .. ARGV[5]) \
            answer[#answer + 1] = position \
            answer[#answer + 1] = redis.call('HGET', KEYS[1], 'seen:' .. shard) or '0-0' \
        end \
    end \
    return answer";

/// The beginning of the others. `KEYS`: the hash, then shards. `ARGV`: token, then what follows, with the shards' numbers
/// from `ARGV[first]` on, two arguments for each. Answers 0 when the caller has a successor.
macro_rules! fenced {
    ($first:literal, $rest:literal) => {
        concat!(
            "#!lua flags=allow-oom\nlocal function place(i) return ",
            $first,
            " + (i - 2) * 2 end \
            local function parts(id) local ms, seq = string.match(id, '^(%d+)-(%d+)$') return tonumber(ms), tonumber(seq) end \
            local function is_above(a, b) \
                local a_ms, a_seq = parts(a) \
                local b_ms, b_seq = parts(b) \
                return a_ms > b_ms or (a_ms == b_ms and a_seq > b_seq) \
            end \
            for i = 2, #KEYS do \
                local holder = redis.call('HGET', KEYS[1], 'holder:' .. ARGV[place(i)]) \
                if not holder or string.match(holder, ' (%w+)$') ~= ARGV[1] then return {0} end \
            end ",
            $rest
        )
    };
}

/// `ARGV`: token, how many at most, the field that says that the holder lives; for each shard its number and the id to
/// read after. Answers 1 and for each shard its entries.
const READ: &str = fenced!(
    "4",
    "local time = redis.call('TIME') \
    local now = time[1] * 1000 + math.floor(time[2] / 1000) \
    if now - tonumber(redis.call('HGET', KEYS[1], ARGV[3]) or '0') > 5000 then redis.call('HSET', KEYS[1], ARGV[3], now) end \
    local left = tonumber(ARGV[2]) \
    local answer = {1} \
    for i = 2, #KEYS do \
        local found = {} \
        if left > 0 then \
            found = redis.call('XRANGE', KEYS[i], '(' .. ARGV[place(i) + 1], '+', 'COUNT', left) \
            left = left - #found \
        end \
        if #found > 0 then \
            local seen = redis.call('HGET', KEYS[1], 'seen:' .. ARGV[place(i)]) \
            if not seen or is_above(found[#found][1], seen) then \
                redis.call('HSET', KEYS[1], 'seen:' .. ARGV[place(i)], found[#found][1]) \
            end \
        end \
        answer[#answer + 1] = found \
    end \
    return answer"
);

/// `ARGV`: token, group; for each shard its number and the id up to which all is done. Answers 1.
const COMMIT: &str = fenced!(
    "3",
    "for i = 2, #KEYS do redis.call('XGROUP', 'SETID', KEYS[i], ARGV[2], ARGV[place(i) + 1]) end \
    return {1}"
);

/// The same for all shards of the slot, whose holder ends in good order: what it has not done it has not seen. Then, for
/// each shard, what others had seen before it; that stays true. Answers 1.
const LEAVE: &str = fenced!(
    "3",
    "for i = 2, #KEYS do \
        redis.call('XGROUP', 'SETID', KEYS[i], ARGV[2], ARGV[place(i) + 1]) \
        redis.call('HDEL', KEYS[1], 'holder:' .. ARGV[place(i)], 'seen:' .. ARGV[place(i)]) \
        local before = ARGV[place(#KEYS + 1) + i - 2] \
        if is_above(before, ARGV[place(i) + 1]) then redis.call('HSET', KEYS[1], 'seen:' .. ARGV[place(i)], before) end \
    end \
    return {1}"
);

/// `KEYS`: one shard. `ARGV`: how long entries are kept at least, in milliseconds. Trims what is older and done by every
/// group; whole nodes of Redis's tree at a time. A stream that nobody reads is left alone. Answers how many are gone.
const TRIM: &str = "#!lua flags=allow-oom\n\
    if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end \
    local function parts(id) local ms, seq = string.match(id, '^(%d+)-(%d+)$') return tonumber(ms), tonumber(seq) end \
    local time = redis.call('TIME') \
    local ms, seq = time[1] * 1000 + math.floor(time[2] / 1000) - tonumber(ARGV[1]), 0 \
    if ms <= 0 then return 0 end \
    local low = string.format('%.0f-0', ms) \
    local groups = redis.call('XINFO', 'GROUPS', KEYS[1]) \
    if #groups == 0 then return 0 end \
    for _, info in ipairs(groups) do \
        local name, last, pending \
        for f = 1, #info, 2 do \
            if info[f] == 'name' then name = info[f + 1] end \
            if info[f] == 'last-delivered-id' then last = info[f + 1] end \
            if info[f] == 'pending' then pending = info[f + 1] end \
        end \
        if pending > 0 then last = redis.call('XPENDING', KEYS[1], name)[2] end \
        local its_ms, its_seq = parts(last) \
        if its_ms < ms or (its_ms == ms and its_seq < seq) then ms, seq, low = its_ms, its_seq, last end \
    end \
    return redis.call('XTRIM', KEYS[1], 'MINID', '~', low)";

pub(super) struct Scripts {
    pub open: Script,
    pub read: Script,
    pub commit: Script,
    pub leave: Script,
    pub trim: Script,
}

impl Scripts {
    pub fn new() -> Self {
        Self {
            open: Script::new(OPEN),
            read: Script::new(READ),
            commit: Script::new(COMMIT),
            leave: Script::new(LEAVE),
            trim: Script::new(TRIM),
        }
    }
}

/// What a script has said: nothing when the caller was refused.
pub(super) fn answer(value: Value) -> Option<Option<Vec<Value>>> {
    let Value::Array(mut items) = value else { return None };
    if items.is_empty() {
        return None;
    }
    match items.remove(0) {
        Value::Int(1) => Some(Some(items)),
        Value::Int(0) => Some(None),
        _ => None,
    }
}
