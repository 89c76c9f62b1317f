#!/bin/sh
# Make the base of an image from Debian's packages, where no registry of images can be reached: base_image.sh NAME
set -eu
name=$1
suite=${SUITE:-bookworm}
mirror=${MIRROR:-http://deb.debian.org/debian}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
debootstrap --variant=minbase "$suite" "$folder/root" "$mirror" >"$folder/log" || {
    tail -20 "$folder/log" >&2
    exit 1
}
rm -rf "$folder/root/var/cache/apt/archives"/*.deb "$folder/root/var/lib/apt/lists"/*
container=$(buildah from scratch)
buildah add --quiet "$container" "$folder/root" / >/dev/null
buildah commit --quiet --rm "$container" "$name" >/dev/null
