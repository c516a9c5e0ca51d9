// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds import cycles between the files of each crate, and between those of the Python package.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::run::{Result, root};

/// Modules that may import each other. Each entry has the crate or package, the modules, and the
/// reason why the cycle is harmless. A module and its children need no entry.
const ALLOWED: [(&str, &[&str], &str); 2] = [
    (
        "tensorstream",
        &["streaming._symbolic", "streaming._symbolic_tensor"],
        "a tensor subclass and the operations on it, which PyTorch calls through the class",
    ),
    (
        "tensorstream",
        &[
            "streaming._stored_weights",
            "streaming._streamed_tensor",
            "streaming._units",
            "streaming._weights",
        ],
        "the weights of a device name their stored tensors, which are those of all devices; only \
         a type annotation refers back",
    ),
];

/// A module, as the names on its path from the root of the crate or package.
type Module = Vec<String>;
/// The modules that each module imports from.
type Imports = BTreeMap<Module, BTreeSet<Module>>;

/// Checks that no files import each other, directly or through other files.
///
/// # Errors
/// Returns an error that lists all cycles.
pub(crate) fn cycles() -> Result<()> {
    let crates =
        fs::read_dir(root().join("crates")).map_err(|e| format!("cannot list crates: {e}"))?;
    let mut wrong = Vec::new();
    let mut files = 0;
    for directory in crates.filter_map(std::result::Result::ok) {
        let name = directory.file_name().to_string_lossy().into_owned();
        let imports = rust_imports(&directory.path().join("src"))?;
        files += imports.len();
        wrong.extend(found_in(&name, &imports));
    }
    let package = root().join("crates/ts-py/python/tensorstream");
    let imports = python_imports(&package)?;
    files += imports.len();
    wrong.extend(found_in("tensorstream", &imports));
    if wrong.is_empty() {
        println!("{files} files: no cycles of imports");
        return Ok(());
    }
    Err(wrong.join("\n  "))
}

fn found_in(name: &str, imports: &Imports) -> Vec<String> {
    components(imports)
        .into_iter()
        .map(|modules| modules.iter().map(|module| module.join(".")).collect::<Vec<_>>())
        .filter(|modules| !allowed(name, modules))
        .map(|modules| format!("{name}: files import each other: {}", modules.join(", ")))
        .collect()
}

fn allowed(name: &str, modules: &[String]) -> bool {
    ALLOWED.iter().any(|(of, set, _)| *of == name && modules.iter().all(|m| set.contains(&&m[..])))
}

/// Reads all files with the given extension below a directory. Returns their text by module.
fn sources(directory: &Path, extension: &str) -> Result<BTreeMap<Module, String>> {
    let mut found = BTreeMap::new();
    let mut pending: Vec<PathBuf> = vec![directory.into()];
    while let Some(path) = pending.pop() {
        let failed = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
        if path.is_dir() {
            for entry in fs::read_dir(&path).map_err(failed)? {
                pending.push(entry.map_err(failed)?.path());
            }
        } else if path.extension().is_some_and(|found| found == extension) {
            let below = path
                .strip_prefix(directory)
                .expect("only paths below `directory` are found")
                .with_extension("");
            let mut module: Module =
                below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
            if matches!(module.last().map(String::as_str), Some("mod" | "lib" | "__init__")) {
                module.pop();
            }
            found.insert(module, fs::read_to_string(&path).map_err(failed)?);
        }
    }
    Ok(found)
}

/// Returns the imports between the modules of a crate. An import of a re-exported name counts as an
/// import from the module that defines the name. Imports in tests, and imports from a module's own
/// children, are ignored.
fn rust_imports(src: &Path) -> Result<Imports> {
    let mut texts = sources(src, "rs")?;
    texts.remove(&vec!["main".to_string()]);
    for text in texts.values_mut() {
        *text = without_comments_and_tests(text);
    }
    let modules: BTreeSet<Module> = texts.keys().cloned().collect();
    let mut exports: BTreeMap<(Module, String), Module> = BTreeMap::new();
    for (module, text) in &texts {
        for (_, path, name) in uses(text) {
            if let Some(target) = absolute(&modules, module, &path) {
                exports.insert((module.clone(), name), target);
            }
        }
    }
    let mut imports = Imports::new();
    for (module, text) in &texts {
        let used = uses(text).into_iter().filter(|(public, ..)| !public).map(|(_, path, _)| path);
        let targets = used
            .chain(inline_paths(text))
            .filter_map(|path| absolute(&modules, module, &path))
            .filter_map(|path| home(&modules, &exports, path))
            .filter(|target| !target.starts_with(module));
        imports.insert(module.clone(), targets.collect());
    }
    Ok(imports)
}

fn without_comments_and_tests(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let code = text.lines().map(|line| line.split("//").next().unwrap_or(line));
    code.collect::<Vec<_>>().join("\n")
}

/// Returns the names that `use` declarations import: whether each is re-exported, its path, and its
/// name in this module.
fn uses(text: &str) -> Vec<(bool, Vec<String>, String)> {
    let mut found = Vec::new();
    for statement in text.split(';') {
        let Some(at) = statement.rfind("use ") else { continue };
        let (before, tree) = (&statement[..at], &statement[at + 4..]);
        let line = before.rsplit('\n').next().unwrap_or(before).trim();
        if !(line.is_empty() || line == "pub" || line.starts_with("pub(")) {
            continue;
        }
        let mut leaves = Vec::new();
        expand(&[], tree.trim(), &mut leaves);
        found.extend(leaves.into_iter().map(|(path, name)| (!line.is_empty(), path, name)));
    }
    found
}

/// Expands a tree of imports such as `a::{b, c as d}`, and adds its paths and names to `leaves`.
fn expand(prefix: &[String], tree: &str, leaves: &mut Vec<(Vec<String>, String)>) {
    if let Some(group) = tree.strip_prefix('{') {
        let group = group.trim_end().strip_suffix('}').unwrap_or(group);
        let (mut depth, mut start) = (0, 0);
        for (at, c) in group.char_indices().chain([(group.len(), ',')]) {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    let item = group[start..at].trim();
                    if !item.is_empty() {
                        expand(prefix, item, leaves);
                    }
                    start = at + 1;
                }
                _ => {}
            }
        }
        return;
    }
    let mut path = prefix.to_vec();
    match tree.split_once("::") {
        Some((first, rest)) if !first.contains([' ', '{']) => {
            path.push(first.trim().into());
            expand(&path, rest.trim(), leaves);
        }
        _ => {
            let (item, name) = tree.split_once(" as ").unwrap_or((tree, tree));
            path.push(item.trim().into());
            leaves.push((path, name.trim().into()));
        }
    }
}

/// Returns the paths that begin with `crate::` or `super::` in expressions and types.
fn inline_paths(text: &str) -> Vec<Vec<String>> {
    let word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let paths = text.split(|c: char| !word(c)).map(|path| path.split("::"));
    paths
        .map(|path| path.map(String::from).collect::<Vec<_>>())
        .filter(|path| path.len() > 1 && matches!(&path[0][..], "crate" | "super"))
        .collect()
}

/// Resolves a path in `module` to a path from the root of the crate. Returns `None` if the path
/// begins with the name of another crate.
fn absolute(modules: &BTreeSet<Module>, module: &Module, path: &[String]) -> Option<Module> {
    let mut base = module.clone();
    let mut rest = path;
    match &path[0][..] {
        "crate" => return Some(path[1..].to_vec()),
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        _ => {
            base.push(path[0].clone());
            let is_child = modules.contains(&base);
            base.pop();
            if !is_child {
                return None;
            }
        }
    }
    base.extend_from_slice(rest);
    Some(base)
}

/// Returns the module that defines the item at `path`, after following re-exports.
fn home(
    modules: &BTreeSet<Module>,
    exports: &BTreeMap<(Module, String), Module>,
    mut path: Module,
) -> Option<Module> {
    for _ in 0..8 {
        let module = (0..=path.len())
            .rev()
            .map(|len| path[..len].to_vec())
            .find(|prefix| modules.contains(prefix))?;
        let Some(name) = path.get(module.len()) else { return Some(module) };
        let Some(target) = exports.get(&(module.clone(), name.clone())) else {
            return Some(module);
        };
        if *target == path {
            return Some(module);
        }
        let mut next = target.clone();
        next.extend_from_slice(&path[module.len() + 1..]);
        path = next;
    }
    None
}

/// Returns the imports between the modules of the Python package, including imports inside
/// functions. `__init__.py` files are ignored, because they import the modules of public names.
fn python_imports(package: &Path) -> Result<Imports> {
    let texts = sources(package, "py")?;
    let modules: BTreeSet<Module> = texts.keys().cloned().collect();
    let is_package = |module: &Module| modules.iter().any(|m| m != module && m.starts_with(module));
    let mut imports = Imports::new();
    for (module, text) in texts.iter().filter(|(module, _)| !is_package(module)) {
        let mut targets = BTreeSet::new();
        for line in text.replace("(\n", "(").lines() {
            let Some((from, names)) = line
                .trim_start()
                .strip_prefix("from .")
                .and_then(|rest| rest.split_once(" import "))
            else {
                continue;
            };
            let levels = 1 + from.chars().take_while(|&c| c == '.').count();
            let mut base = module[..module.len().saturating_sub(levels)].to_vec();
            base.extend(
                from.trim_start_matches('.').split('.').filter(|s| !s.is_empty()).map(Into::into),
            );
            for name in names.trim_matches(['(', ')']).split(',') {
                let mut full = base.clone();
                full.extend(name.split_whitespace().next().map(String::from));
                let target = if modules.contains(&full) { full } else { base.clone() };
                if modules.contains(&target) && !is_package(&target) && target != *module {
                    targets.insert(target);
                }
            }
        }
        imports.insert(module.clone(), targets);
    }
    Ok(imports)
}

/// Returns the sets of modules that import each other, directly or through other modules.
fn components(imports: &Imports) -> Vec<Vec<Module>> {
    let reach = |from: &Module| {
        let mut seen = BTreeSet::new();
        let mut pending = vec![from.clone()];
        while let Some(module) = pending.pop() {
            for next in imports.get(&module).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    pending.push(next.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        imports.keys().map(|module| (module, reach(module))).collect();
    let mut found: BTreeSet<Vec<Module>> = BTreeSet::new();
    for (module, there) in reached.iter().filter(|(module, there)| there.contains(**module)) {
        let both =
            there.iter().filter(|other| reached.get(other).is_some_and(|r| r.contains(*module)));
        found.insert(both.cloned().collect());
    }
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imports(edges: &[(&str, &[&str])]) -> Imports {
        let module = |name: &str| vec![name.to_string()];
        edges
            .iter()
            .map(|(from, to)| (module(from), to.iter().map(|to| module(to)).collect()))
            .collect()
    }

    #[test]
    fn a_cycle_is_found_and_a_diamond_is_not_a_cycle() {
        let diamond = imports(&[("a", &["b", "c"]), ("b", &["d"]), ("c", &["d"]), ("d", &[])]);
        assert!(components(&diamond).is_empty());
        let cycle = imports(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"]), ("d", &["a"])]);
        assert_eq!(components(&cycle), [[vec!["b".to_string()], vec!["c".to_string()]]]);
    }

    #[test]
    fn nested_uses_are_expanded() {
        let text = "use crate::{Error, a::{b, c as d}};\npub use super::e::F;\nlet unused = 1;";
        let found: Vec<String> = uses(text)
            .into_iter()
            .map(|(public, path, name)| format!("{public} {} {name}", path.join("/")))
            .collect();
        assert_eq!(
            found,
            [
                "false crate/Error Error",
                "false crate/a/b b",
                "false crate/a/c d",
                "true super/e/F F",
            ]
        );
    }
}
