# shellcheck shell=bash disable=SC2154
# Horovod's step of scripts/setup, in its variables: a wheel built once for each torch, Python, compiler and patches, kept in $CACHE.

horovod_options() { env | grep -E '^HOROVOD_(WITH|GPU|CPU|CUDA|NCCL|BUILD)' | sort || true; }

# A fingerprint of the patches: a changed patch is another Horovod.
horovod_patches() { sha256sum <"$ROOT/scripts/setting_up/horovod_patches.py" | cut -c 1-8; }

# What the environment's Horovod was made of.
horovod_note() { echo "$HOROVOD torch-$torch patches-$(horovod_patches) $(horovod_options)"; }

# All that a Horovod wheel depends on: its name in the cache.
horovod_key() {
  "$python" - "$torch" "$("$CXX" -dumpfullversion -dumpversion)" "$(basename "$(readlink -f "$(command -v "$CXX")")")" \
    "$(horovod_patches)" "$options" <<'PY'
import hashlib, platform, sys, sysconfig

torch, version, compiler, patches, options = sys.argv[1:]
python, machine, libc = sysconfig.get_config_var("SOABI"), sysconfig.get_platform(), "-".join(platform.libc_ver())
print(f"torch-{torch}_{python}_{machine}_{libc}_{compiler}-{version}_patches-{patches}", end="")
print("_" + hashlib.sha256(options.encode()).hexdigest()[:8] if options else "")
PY
}

# Whether the wheel is there already, as far as that is known before torch is installed.
horovod_cached() {
  local options
  options=$(horovod_options)
  [ -n "$torch" ] && compgen -G "$CACHE/horovod-$HOROVOD/$(horovod_key)/*.whl" >/dev/null
}

build_horovod() { # into the given new directory; runs under `progress`
  local work=$1 jobs
  jobs=$(compilers)
  cd "$work" || return
  echo "horovod==$HOROVOD --hash=sha256:$HOROVOD_SHA256" >pinned.txt
  pip download --require-hashes --no-deps --no-build-isolation --no-binary horovod -d . -r pinned.txt
  tar xzf "horovod-$HOROVOD.tar.gz"
  cd "horovod-$HOROVOD" || return
  "$python" "$ROOT/scripts/setting_up/horovod_patches.py" .
  export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1
  [ -n "${HOROVOD_WITH_MPI:-}" ] || export HOROVOD_WITHOUT_MPI=1
  # Gloo uses types of <cstdint>, which other headers declared until GCC 15.
  export CXXFLAGS="-include cstdint ${CXXFLAGS:-}"
  PATH="$prefix/bin:$PATH" CMAKE_GENERATOR=Ninja CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    MAKEFLAGS="-j$jobs" CMAKE_BUILD_PARALLEL_LEVEL=$jobs \
    pip wheel -v --no-deps --no-build-isolation --no-cache-dir -w "$work" .
}

horovod_done() {
  done_for horovod "$(horovod_note)" && version_of horovod >/dev/null && return
  # An environment that brought a working Horovod keeps it.
  [ ! -e "$notes/horovod" ] && "$python" -c 'import horovod.torch' 2>/dev/null
}

install_horovod() {
  local options key home
  options=$(horovod_options)
  key=$(horovod_key)
  home=$CACHE/horovod-$HOROVOD/$key
  if ! compgen -G "$home/*.whl" >/dev/null; then
    mkdir -p "$home"
    # Two set-ups at once: one builds, the other waits and finds the wheel.
    exec 8>"$home/lock"
    flock -n 8 || progress "waiting for another set-up that builds Horovod" "$logs/horovod-wait.log" flock 8
    if ! compgen -G "$home/*.whl" >/dev/null; then
      # Not in the cache: gloo's CMake takes its own path for a regular expression, and "g++" is not a good one.
      make_scratch gradcomp-horovod
      progress "building Horovod $HOROVOD (some minutes, once for this torch)" "$home/build.log" build_horovod "$scratch"
      # Copied beside its place, then renamed: the wheel appears whole or not at all.
      cp "$scratch"/horovod-*.whl "$home/wheel.part"
      mv "$home/wheel.part" "$home/$(basename "$scratch"/horovod-*.whl)"
      remove_scratch
    fi
    exec 8>&-
  fi
  # Forced: pip would keep a Horovod of the same version with other patches. What it needs is among the build tools.
  progress "installing Horovod $HOROVOD" "$logs/horovod.log" pip install --force-reinstall --no-deps "$home"/horovod-*.whl
  "$python" -c 'import horovod.torch'
  note horovod "$(horovod_note)"
}
