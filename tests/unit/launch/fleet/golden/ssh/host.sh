#!/bin/bash
# Usage: host.sh HOST TICKET. The ticket goes through standard input, and so is never part of a command line.
while :; do
    ssh -o BatchMode=yes -o ServerAliveInterval=15 "$1" 'mkdir -p offbeat && cd offbeat && . venv/bin/activate && exec offbeat host --ticket - --grace 90' <"$2"
    rc=$?
    case $rc in
    0 | 65) exit $rc ;;
    esac
    sleep 10
done
