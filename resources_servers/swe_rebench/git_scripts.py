"""The shell scripts that `patches.py` runs in a sandbox. They need a POSIX shell, git and the usual small tools.

`@NAME@` stands for quoted words that the caller puts in.
"""

from typing import Final

EXIT_TOO_LARGE: Final = 3
EXIT_NO_OBJECTS: Final = 4

PRELUDE: Final = b"""
set -u
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_CONFIG_PARAMETERS
export LC_ALL=C GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1
export GIT_TERMINAL_PROMPT=0 GIT_NO_REPLACE_OBJECTS=1 GIT_OPTIONAL_LOCKS=0 GIT_PAGER=cat
cd @REPOSITORY@ || exit 1
own=$PWD/.git
"""

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

# Prints the tree of all files that are not ignored.
BASELINE: Final = b"""
export GIT_DIR="$own" GIT_WORK_TREE="$PWD"
index=$GIT_DIR/baseline-index
cp "$GIT_DIR/index" "$index" || exit 1
GIT_INDEX_FILE=$index git add -A --ignore-errors -- . @EXCLUDED@ || :
GIT_INDEX_FILE=$index git write-tree || exit 1
rm -f "$index"
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
git init -q --template= "$scratch/made" || exit 1
export GIT_DIR="$scratch/made/.git" GIT_WORK_TREE="$PWD"
mkdir -p "$GIT_DIR/info" "$GIT_DIR/objects/info" "$GIT_DIR/objects/pack"
# A file is text or binary by its content, whatever the agent declares it to be.
echo '* !diff' > "$GIT_DIR/info/attributes"
if [ -n "$given" ]; then
    git index-pack --stdin < "$given" > /dev/null || exit 4
elif [ -d "$own/objects" ]; then
    echo "$own/objects" > "$GIT_DIR/objects/info/alternates"
fi
git cat-file -e "$tree^{tree}" 2> /dev/null || exit 4
git read-tree "$tree" || exit 4
printf '%s' @INFO_EXCLUDE@ > "$GIT_DIR/info/exclude"

find . -path ./.git -prune -o @NESTED@ -name .git -prune -exec rm -rf {} + || :
git add -A -- . @EXCLUDED@ 2> /dev/null || {
    chmod -R u+rwX . 2> /dev/null
    git add -A --ignore-errors -- . @EXCLUDED@ || :
}
if [ -e "$own" ]; then
    GIT_DIR="$own" git -c core.fsmonitor=false -c core.hooksPath=/dev/null ls-files -z -c -i --exclude-standard \\
        < /dev/null > "$scratch/forced" 2> /dev/null
    git update-index -z --add --remove --stdin < "$scratch/forced" || :
fi
@RESET_OWNED@
git diff --cached --binary --full-index --find-renames --no-color --no-ext-diff --no-textconv --no-relative \\
    --ignore-submodules=all --src-prefix=a/ --dst-prefix=b/ "$tree" -- . @EXCLUDED@ > "$scratch/patch" || exit 4
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

# Reads the patch; $1: the repository.
APPLY: Final = """
export LC_ALL=C GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1
cd "$1" || exit 1
export GIT_DIR="$PWD/.git" GIT_WORK_TREE="$PWD"
shift
exec git apply --whitespace=nowarn "$@" -
"""
