# shellcheck shell=bash disable=SC2154
# What scripts/setup needs of the machine. All that is missing is found before anything is downloaded, and said at once.

# Print the compiler of C that belongs to the compiler of C++, if there is one: gloo's build asks for both.
c_compiler() {
  local name
  name=$(basename "$CXX")
  case $name in
  *clang++*) name=${name/clang++/clang} ;;
  *g++*) name=${name/g++/gcc} ;;
  c++) name=cc ;;
  esac
  if [[ $CXX == */* ]]; then name=$(dirname "$CXX")/$name; fi
  command -v "$name" || true
}

# Whether $CXX makes a library of C++20: libstdc++'s headers and the linker count, too.
compiler_works() { # scratch folder
  cat >"$1/probe.cpp" <<'CPP'
#include <concepts>
#include <source_location>
#include <span>
#include <string>
#include <thread>
template <std::integral T> T twice(T x) { return 2 * x; }
int length(std::span<const int> all) { return twice(static_cast<int>(all.size())); }
std::string file() { std::thread([] {}).join(); return std::source_location::current().file_name(); }
CPP
  "$CXX" -std=c++20 -shared -fPIC -pthread -o "$1/probe.so" "$1/probe.cpp" >"$1/probe.log" 2>&1
}

# Whether nvcc compiles with $CXX: it refuses compilers that are newer than itself.
nvcc_works() { # scratch folder
  echo '#include <vector>
__global__ void nothing() {}' >"$1/probe.cu"
  nvcc -std=c++17 -c -o "$1/probe.o" "$1/probe.cu" -ccbin "${CUDAHOSTCXX:-$CXX}" >"$1/nvcc.log" 2>&1
}

# Whether packages can be installed here without a question.
can_install() {
  command -v apt-get >/dev/null && { [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null; }
}

# Install $packages, then $optional as far as that goes.
install_packages() {
  local root=(sudo -n)
  [ "$(id -u)" -ne 0 ] || root=()
  root+=(env DEBIAN_FRONTEND=noninteractive apt-get)
  "${root[@]}" update || true # of several archives, one that does not answer may be another
  [ ${#packages[@]} -eq 0 ] || "${root[@]}" install --yes --no-install-recommends "${packages[@]}" || return
  [ ${#optional[@]} -eq 0 ] || "${root[@]}" install --yes --no-install-recommends "${optional[@]}" || true
}

# Find what the build lacks, and the packages that have it. $unmet: whether something is in none of them.
find_lacks() { # the Python that runs the build; whether it must make an environment (yes|no)
  local base=$1 environment=$2 headers version="" why
  lacks=() packages=() unmet=no
  if ! command -v "$base" >/dev/null; then
    lacks+=("Python 3.10 or newer ($base is not there)")
    packages+=(python3 python3-venv python3-dev)
    [ "$base" = python3 ] || unmet=yes
  elif ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    lacks+=("Python 3.10 or newer ($base is $("$base" -V 2>&1); PYTHON names another)")
    unmet=yes
  else
    # Debian's packages of a Python that is not its default have the version in their names.
    case $base in python3.* | */python3.*) version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ;; esac
    if [ "$environment" = yes ] && ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
      lacks+=("Python's venv module")
      packages+=("python3${version#3}-venv")
    fi
    headers=$("$base" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if [ ! -e "$headers/Python.h" ]; then
      lacks+=("Python's headers ($headers/Python.h)")
      packages+=("python3${version#3}-dev")
    fi
  fi
  if ! command -v "$CXX" >/dev/null; then
    lacks+=("a C++20 compiler ($CXX is not a program; CXX names another)")
    case $(basename "$CXX") in
    clang++) packages+=(clang) ;;
    clang++-*) packages+=("clang-${CXX##*-}") ;;
    g++-*) packages+=("$(basename "$CXX")") ;;
    *) packages+=(g++) ;;
    esac
  elif ! compiler_works "$scratch"; then
    why=$(grep -m 1 -iE 'error|not found|cannot' "$scratch/probe.log" || echo "it says nothing")
    lacks+=("a C++20 compiler (CXX=$CXX fails: $why; GCC 11 works)")
    packages+=(g++)
    [ "$CXX" = c++ ] || unmet=yes
  fi
  if ! command -v cmake >/dev/null; then
    lacks+=("CMake")
    packages+=(cmake)
  elif ! cmake --version | awk 'NR == 1 { split($3, v, "."); exit !(v[1] > 3 || v[1] == 3 && v[2] >= 22) }'; then
    lacks+=("CMake 3.22 or newer ($(cmake --version | head -n 1); pip install cmake brings one)")
    unmet=yes
  fi
}

missing() {
  local sentence
  sentence=$(printf '%s, ' "${lacks[@]}")
  echo "missing on this machine: ${sentence%, }"
}

# Check that the machine has all that a build needs. Install what is missing where that takes no password; else end with one sentence
# and one line for apt-get.
check_machine() { # the Python that runs the build; whether it must make an environment (yes|no); packages that are of use, too
  local lacks packages unmet sentence optional=("${@:3}")
  make_scratch gradcomp-setup
  find_lacks "$1" "$2"
  if [ "$unmet" = no ] && [ $((${#packages[@]} + ${#optional[@]})) -gt 0 ] && can_install; then
    [ ${#lacks[@]} -eq 0 ] || echo "setup: $(missing)" >&2
    echo "setup: installs with apt-get:$(printf ' %s' "${packages[@]}" "${optional[@]}")" >&2
    progress "installing system packages" "$logs/apt.log" install_packages
    find_lacks "$1" "$2"
  fi
  if [ ${#lacks[@]} -gt 0 ]; then
    sentence=$(missing)
    if [[ $sentence == *"(CXX=$CXX fails"* && $CXX != c++ ]]; then
      sentence+=$'\n'"setup: unset CXX, too, or let it name a compiler that works"
    fi
    [ ${#packages[@]} -eq 0 ] || sentence+=$'\n'"setup: as root, run: apt-get install ${packages[*]}"
    die "$sentence"
  fi
  if [ "${GRADCOMP_CUDA:-AUTO}" != OFF ] && command -v nvcc >/dev/null && ! nvcc_works "$scratch"; then
    die "nvcc fails with CXX=$CXX ($(grep -m 1 -iE 'error|not found|fatal' "$scratch/nvcc.log")):" \
      "CUDAHOSTCXX names another compiler for it, GRADCOMP_CUDA=OFF leaves the CUDA kernels out"
  fi
  remove_scratch
}

# Check that each folder's file system has this much space; folders on one file system are added up.
check_disk() { # "folder=megabytes" ...
  local pair folder short
  short=$(
    for pair in "$@"; do
      folder=${pair%=*}
      until [ -e "$folder" ]; do folder=$(dirname "$folder"); done
      printf '%s %s\n' "${pair##*=}" "$(df -Pm "$folder" | tail -n 1)"
    done | awk '{ need[$7] += $1; free[$7] = $5 }
      END { for (at in need) if (need[at] > free[at]) printf "%s has %d MB free, and %d MB are needed\n", at, free[at], need[at] }'
  )
  [ -z "$short" ] || die "too little disk: ${short//$'\n'/; }. Free some, or move the checkout, TMPDIR or XDG_CACHE_HOME"
}

# Print how many compilers run at once: one a core, but no more than memory holds, of which a file with torch's headers takes 1.5 GB.
compilers() {
  local cores megabytes
  cores=$(nproc)
  # A container has its limit in one of two places. Where there is none, that is a word, or more than there is.
  megabytes=$({
    awk '$1 == "MemAvailable:" { printf "%.0f\n", $2 / 1024 }' /proc/meminfo
    cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null |
      awk '/^[0-9]/ { printf "%.0f\n", $1 / 1048576 }' || true
  } | sort -n | head -n 1)
  if [ $((megabytes / 1600)) -lt "$cores" ]; then cores=$((megabytes / 1600)); fi
  echo $((cores > 1 ? cores : 1))
}
