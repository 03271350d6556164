#!/bin/sh
# Prints the entries of a token stream as they come, until its end: follow.sh STREAM_ID [LAST_ENTRY_ID [redis-cli's options]]
# For what the fields mean see docs/streams.md.
set -eu
key="headrace:stream:$1"
last="${2:-0-0}"
shift; [ $# -eq 0 ] || shift
while :; do
    reply=$(redis-cli --json "$@" XREAD COUNT 1 BLOCK 2000 STREAMS "$key" "$last") || { sleep 1; continue; }
    [ "$reply" = null ] && continue
    printf '%s\n' "$reply"
    last=$(printf '%s' "$reply" | sed 's/.*\[\["\([0-9]*-[01]\)".*/\1/')
    case "$last" in *-1) exit ;; esac
done
