# shellcheck shell=bash
# What the scripts share: which interpreter they use, the call that sets everything up, and the progress line of long steps.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The version of torch that set-up and the trial of a wheel install.
# shellcheck disable=SC2034
TORCH_VERSION=2.13.0

# Print the comment at the head of the script that runs, and end.
show_help() {
  awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
  exit
}

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Make a scratch folder in $scratch. It goes with remove_scratch, or when the script ends.
make_scratch() { # name
  scratch=$(mktemp -d "${TMPDIR:-/tmp}/$1.XXXXXX")
  trap remove_scratch EXIT
}

remove_scratch() {
  rm -rf "$scratch"
  trap - EXIT
}

# The interpreter to use: the one named by GRADCOMP_PYTHON (its environment is complete and is left as it is: a container's), else
# that of an activated environment that has torch, else the checkout's own.
gradcomp_python() {
  local prefix
  if [ -n "${GRADCOMP_PYTHON:-}" ]; then
    echo "$GRADCOMP_PYTHON"
    return
  fi
  for prefix in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    if [ -n "$prefix" ] && [ -x "$prefix/bin/python" ] &&
      "$prefix/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
      echo "$prefix/bin/python"
      return
    fi
  done
  echo "$ROOT/.venv/bin/python"
}

# Sets up if need be; afterwards $PYTHON is the interpreter, and its environment's programs (horovodrun) come first on PATH.
ensure_setup() { # scripts/setup's option
  "$ROOT/scripts/setup" "$@" || exit
  PYTHON=$(gradcomp_python)
  PATH="$(dirname "$PYTHON"):$PATH"
  export PYTHON PATH
}

# Print the last line of a log that shows progress, cut to the given width. pip logs nothing while it unpacks its packages, one by
# one: those that are newer than its last line are unpacked.
last_step() {
  local unpacked
  unpacked=$(find "${prefix:-$ROOT/.venv}"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' -newer "$1" 2>/dev/null | wc -l)
  tail -c 500000 "$1" | tr '\r' '\n' |
    awk -v unpacked="$unpacked" '
      /^Progress [0-9]+ of [0-9]+/ { printf "Downloading %d of %d MB\n", $2 / 1e6, $4 / 1e6; next }
      /^Installing collected packages: / {
        gsub(",", ""); at = unpacked + 4 < NF ? unpacked + 4 : NF
        printf "Installing package %d of %d: %s\n", at - 3, NF - 3, $at; next
      }
      { print }' |
    grep -E '^ *(\[ *[0-9]+[/%]|-- |Collecting|Downloading|Installing|Building|Created|Preparing)' |
    tail -n 1 | sed -E 's/^ +//; s/ \([^()]*\)$//; s/(\[[^]]*\]) .*\/([^/]+)$/\1 \2/' | cut -c "1-$2" || true
}

# Say, in a log's own words, that pip gave its index up. It goes on to say that there is no version of what it looks for.
unreached() { # log
  local line
  line=$(grep -E '^(WARNING: )?(Retrying \(Retry\(total=0,|Could not fetch URL )' "$1" | tail -n 1) || return 0
  echo ": pip cannot reach its index ($line); PIP_INDEX_URL names another, HTTPS_PROXY a proxy, PIP_CERT its certificates"
}

# progress "what is being done" LOGFILE command...
# Runs the command with its output in the log. Meanwhile the time so far and the latest step are shown: in place on a terminal,
# else in a line every 20 seconds. A failure shows the log's first errors and its end, and where it is.
progress() {
  local what=$1 log=$2 began=$SECONDS said=$SECONDS job monitor=off status=0 width
  shift 2
  mkdir -p "$(dirname "$log")"
  : >"$log"
  case $- in *m*) monitor=on ;; esac
  set -m # a process group of its own: an interrupt ends all of it, and not only its leader
  "$@" >"$log" 2>&1 </dev/null &
  job=$!
  [ $monitor = on ] || set +m
  # shellcheck disable=SC2064
  trap "kill -- -$job 2>/dev/null; wait $job 2>/dev/null || true; echo >&2; exit 130" INT TERM HUP
  while kill -0 "$job" 2>/dev/null; do
    if [ -t 2 ]; then
      width=$(($(tput cols 2>/dev/null || echo 80) - ${#what} - 12))
      printf '\r\033[K%s %ds  %s' "$what" $((SECONDS - began)) "$(last_step "$log" $((width > 10 ? width : 10)))" >&2
    elif [ $((SECONDS - said)) -ge 20 ]; then
      said=$SECONDS
      printf '%s %ds  %s\n' "$what" $((SECONDS - began)) "$(last_step "$log" 100)" >&2
    fi
    sleep 0.25
  done
  wait "$job" || status=$?
  trap - INT TERM HUP
  if [ -t 2 ]; then printf '\r\033[K' >&2; fi
  if [ $status -ne 0 ]; then
    grep -nE '(^|[^A-Za-z_-])([Ee]rror|ERROR)( at|:)|FAILED:' "$log" | head -n 10 >&2 || true
    echo "..." >&2
    tail -n 20 "$log" >&2
    die "$what failed after $((SECONDS - began))s$(unreached "$log"); the whole log is $log"
  fi
  printf '%s: %ds\n' "$what" $((SECONDS - began)) >&2
}
