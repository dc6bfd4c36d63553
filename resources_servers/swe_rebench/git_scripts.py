"""The shell scripts that `patches.py` runs in a sandbox. They need a POSIX shell, git and the usual small tools.

`@NAME@` stands for quoted words that the caller puts in.
"""

from typing import Final

EXIT_TOO_LARGE: Final = 3
EXIT_NO_OBJECTS: Final = 4
EXIT_SKIPPED: Final = 5

PRELUDE: Final = b"""
set -u
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_CONFIG_PARAMETERS
export LC_ALL=C GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1
export GIT_TERMINAL_PROMPT=0 GIT_NO_REPLACE_OBJECTS=1 GIT_OPTIONAL_LOCKS=0 GIT_PAGER=cat
cd @REPOSITORY@ || exit 1
own=$PWD/.git
# What ended by a signal says nothing about the files.
unless_killed() {
    "$@"
    status=$?
    [ "$status" -le 128 ] || exit "$status"
    return "$status"
}
"""

# Files are taken and put byte by byte, and are text or binary by their content, whatever attributes declare.
EXACT_ATTRIBUTES: Final = "* !diff -text !eol !ident !filter !working-tree-encoding"

# Prints the base commit's full name, and as base64 the nested repositories (NUL after each) and what is ignored.
PREPARE: Final = b"""
set -e
# Named by hand: git would not look into the repository of another user, as images may have it.
if [ -d "$own" ]; then GIT_DIR=$own; else GIT_DIR=$(git rev-parse --absolute-git-dir); fi
export GIT_DIR GIT_WORK_TREE="$PWD"
base=$(git rev-parse -q --verify @BASE@"^{commit}") || { echo "it has no commit "@BASE@ >&2; exit 1; }
rm -f "$GIT_DIR/index.lock" "$GIT_DIR/HEAD.lock"
git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c advice.detachedHead=false checkout -q -f --detach "$base"

made=$GIT_DIR/made-anew
rm -rf "$made"
(unset GIT_DIR GIT_WORK_TREE; git init -q --template= "$made")
new=$made/.git
mkdir -p "$new/objects/pack" "$new/info"
echo "$base" | git -c pack.writeBitmaps=false pack-objects -q --revs "$new/objects/pack/pack" > /dev/null
[ ! -f "$GIT_DIR/shallow" ] || cp "$GIT_DIR/shallow" "$new/shallow"
[ ! -f "$GIT_DIR/info/exclude" ] || cp "$GIT_DIR/info/exclude" "$new/info/exclude"
[ ! -d "$GIT_DIR/modules" ] || mv "$GIT_DIR/modules" "$new/modules"
mv "$own" "$own-replaced"
if [ -d "$own-replaced/made-anew" ]; then mv "$own-replaced/made-anew/.git" "$own"; else mv "$new" "$own"; fi
rm -rf "$own-replaced"
export GIT_DIR="$own"
git symbolic-ref HEAD refs/heads/main
git update-ref refs/heads/main "$base"
git config user.name Agent
git config user.email agent@localhost
git config gc.auto 0
git read-tree HEAD
git update-index -q --refresh > /dev/null || :
echo "$base"
find . -path ./.git -prune -o -name .git -prune -print0 | base64 | tr -d '\\n'
echo
[ ! -f "$GIT_DIR/info/exclude" ] || base64 < "$GIT_DIR/info/exclude" | tr -d '\\n'
echo
"""

# Prints the tree of all files that are not ignored, and whether some could not be added.
BASELINE: Final = b"""
export GIT_DIR="$own" GIT_WORK_TREE="$PWD"
index=$GIT_DIR/baseline-index
echo @EXACT@ > "$GIT_DIR/info/attributes" || exit 1
GIT_INDEX_FILE=$index git read-tree HEAD || exit 1
skipped=
unless_killed env "GIT_INDEX_FILE=$index" git add -A --ignore-errors -- . @EXCLUDED@ || skipped=skipped
GIT_INDEX_FILE=$index git write-tree || exit 1
echo "$skipped"
rm -f "$index" "$GIT_DIR/info/attributes"
"""

RESET_OWNED: Final = b"""{
    printf '%s\\0' @OWNED@ | GIT_LITERAL_PATHSPECS=1 xargs -0 git reset -q "$tree" --
} || exit 1"""

# Prints the patch's size, and unless that is too large the patch as base64.
EXTRACT: Final = b"""
tree=@TREE@ given=@OBJECTS@
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch" "${given%/*}"' EXIT
export HOME="$scratch" XDG_CONFIG_HOME="$scratch"
# Pipes have no place in git, and reading one would take for ever. A link in .git may lead to one.
[ ! -e "$own" ] && [ ! -L "$own" ] || find "$own" ! -type d ! -type f -exec rm -f {} +
rm -f "$own/objects/info/alternates"
find . @NESTED@ ! -type d ! -type f ! -type l -exec rm -f {} +
git init -q --template= "$scratch/made" || exit 1
export GIT_DIR="$scratch/made/.git" GIT_WORK_TREE="$PWD"
mkdir -p "$GIT_DIR/info" "$GIT_DIR/objects/info" "$GIT_DIR/objects/pack"
echo @EXACT@ > "$GIT_DIR/info/attributes" || exit 1
if [ -n "$given" ]; then
    unless_killed git index-pack --stdin < "$given" > /dev/null || exit 4
elif [ -d "$own/objects" ]; then
    echo "$own/objects" > "$GIT_DIR/objects/info/alternates"
fi
unless_killed git cat-file -e "$tree^{tree}" || exit 4
unless_killed git read-tree "$tree" || exit 4
printf '%s' @INFO_EXCLUDE@ > "$GIT_DIR/info/exclude" || exit 1

# Of repositories within, the files count. Git takes no file below any spelling of .git.
find . -path ./.git -prune -o @NESTED@ -name '.[gG][iI][tT]' -prune -exec rm -rf {} + || :
unless_killed git add -A -- . @EXCLUDED@ 2> /dev/null || {
    chmod -R u+rwX . 2> /dev/null
    unless_killed git add -A --ignore-errors -- . @EXCLUDED@ || [ @MAY_SKIP@ = yes ] || exit 5
}
if [ -f "$own/index" ]; then
    unless_killed env "GIT_INDEX_FILE=$own/index" git ls-files -z -c -i --exclude-standard > "$scratch/forced" || :
    unless_killed git update-index -z --add --remove --stdin < "$scratch/forced" || :
fi
@RESET_OWNED@
unless_killed git diff --cached --binary --full-index --find-renames --no-color --no-ext-diff --no-textconv \\
    --no-relative --ignore-submodules=all --src-prefix=a/ --dst-prefix=b/ "$tree" -- . @EXCLUDED@ \\
    > "$scratch/patch" || exit 4
size=$(wc -c < "$scratch/patch" | tr -d ' ')
echo "$size"
[ "$size" -le @LIMIT@ ] || exit 3
base64 < "$scratch/patch"
"""

# Prints the objects of the baseline's tree as a pack, as base64.
PACK_TREE: Final = b"""
export GIT_DIR="$own"
git rev-list --objects @TREE@ > "$own/listed" || exit 1
cut -d ' ' -f 1 < "$own/listed" | git pack-objects -q --stdout > "$own/packed" || exit 1
base64 < "$own/packed"
rm -f "$own/listed" "$own/packed"
"""

# Reads the pack as base64; prints where it is.
TAKE_PACK: Final = """
folder=$(mktemp -d) && base64 -d > "$folder/pack" && echo "$folder/pack"
"""

# Keeps the files of the tests as they are, below the folder that it prints.
KEEP_OWNED: Final = b"""
kept=$(mktemp -d) || exit 1
for path in @OWNED@; do
    if [ -e "./$path" ] || [ -L "./$path" ]; then
        case $path in */*) mkdir -p "$kept/${path%/*}" || exit 1 ;; esac
        cp -pPR "./$path" "$kept/$path" || exit 1
    fi
done
echo "$kept"
"""

# Makes the files of the tests what was kept, whatever lies in their place or in that of their folders.
PUT_OWNED: Final = b"""
kept=@KEPT@
for path in @OWNED@; do
    rest=$path above=.
    while [ "$rest" != "${rest#*/}" ]; do
        above=$above/${rest%%/*} rest=${rest#*/}
        if [ -L "$above" ] || { [ -e "$above" ] && [ ! -d "$above" ]; }; then rm -f "$above" || exit 1; fi
    done
    rm -rf "./$path" || exit 1
    if [ -e "$kept/$path" ] || [ -L "$kept/$path" ]; then
        case $path in */*) mkdir -p "./${path%/*}" || exit 1 ;; esac
        cp -pPR "$kept/$path" "./$path" || exit 1
    fi
done
rm -rf "$kept"
"""

# Reads the patch; $1: the repository, $2: the attributes that it is written by, empty for the repository's own.
APPLY: Final = """
export LC_ALL=C GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1
cd "$1" || exit 1
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
git init -q --template= "$scratch" || exit 1
export GIT_DIR="$scratch/.git" GIT_WORK_TREE="$PWD"
mkdir -p "$GIT_DIR/info" && printf '%s\\n' "$2" > "$GIT_DIR/info/attributes" || exit 1
shift 2
git apply --whitespace=nowarn "$@" -
"""
