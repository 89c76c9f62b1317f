#!/bin/sh
# Run one learner in this terminal: learner.sh [RUN_FILE] [section.field=value ...]
# The broker's address is the same for all roles; set OFFBEAT_BROKER and OFFBEAT_HTTP to change it.
set -eu
cd "$(dirname "$0")/../.."
run_file=${1:-recipes/spell_backward.toml}
[ $# -eq 0 ] || shift
exec "${OFFBEAT:-.venv/bin/offbeat}" learner "$run_file" \
    "broker.endpoint=${OFFBEAT_BROKER:-tcp://127.0.0.1:5755}" "broker.http=${OFFBEAT_HTTP:-127.0.0.1:5756}" "$@"
