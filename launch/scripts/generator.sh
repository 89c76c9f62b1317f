#!/bin/sh
# Run one generator in this terminal: generator.sh [RUN_FILE] [--name NAME] [section.field=value ...]
# The broker's address is the same for all roles; set OFFBEAT_BROKER and OFFBEAT_HTTP to change it.
set -eu
cd "$(dirname "$0")/../.."
run_file=${1:-recipes/spell_backward.toml}
[ $# -eq 0 ] || shift
exec "${OFFBEAT:-.venv/bin/offbeat}" generator "$run_file" \
    "broker.endpoint=${OFFBEAT_BROKER:-tcp://127.0.0.1:5755}" "broker.http=${OFFBEAT_HTTP:-127.0.0.1:5756}" "$@"
