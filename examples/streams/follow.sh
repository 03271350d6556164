#!/bin/sh
# Prints the entries of a token stream as they come, until its end: follow.sh STREAM_ID [LAST_ENTRY_ID [redis-cli's options]]
# For what the fields mean see docs/streams.md.
set -eu
id="$1"
last="${2:-0-0}"
shift; [ $# -eq 0 ] || shift

# A bulk job's row is streamed while somebody asks for it.
ask_for_row() {
    now=$(redis-cli "$@" TIME | head -n 1)
    redis-cli "$@" ZADD "headrace:watch:${id%/*}" $((now + 30)) "${id##*/}"
    redis-cli "$@" EXPIRE "headrace:watch:${id%/*}" 60
}

while :; do
    case "$id" in
        req_*) ;;
        *) ask_for_row "$@" >/dev/null || { sleep 1; continue; } ;;
    esac
    reply=$(redis-cli --json "$@" XREAD COUNT 1 BLOCK 2000 STREAMS "headrace:stream:$id" "$last") || { sleep 1; continue; }
    [ "$reply" = null ] && continue
    printf '%s\n' "$reply"
    last=$(printf '%s' "$reply" | sed 's/.*\[\["\([0-9]*-[01]\)".*/\1/')
    case "$last" in *-1) exit ;; esac
done
