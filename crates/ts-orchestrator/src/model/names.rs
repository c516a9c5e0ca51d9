// SPDX-License-Identifier: MIT OR Apache-2.0
//! The names of units and tensors: how tensors are grouped, sorted and suggested.

use std::cmp::Ordering;
use std::path::Path;

use crate::Error;

/// The number of names that an error lists.
const LISTED: usize = 4;

/// Returns the error for a name that does not exist among `known`.
pub(super) fn no_such<'a>(
    kind: &'static str,
    name: &str,
    path: &Path,
    nearest: Option<&str>,
    known: impl ExactSizeIterator<Item = &'a str>,
) -> Error {
    let nearest = nearest.map(|nearest| format!("did you mean `{nearest}`? "));
    let count = known.len();
    let mut listed: Vec<_> = known.take(LISTED).map(|name| format!("`{name}`")).collect();
    if count > LISTED {
        listed.push("...".into());
    }
    let hint = format!("{}there are {count}: {}", nearest.unwrap_or_default(), listed.join(", "));
    Error::NoSuchName { kind, name: name.into(), path: path.into(), hint }
}

/// Returns the name of the unit that a tensor belongs to: the path to the innermost number, or else
/// the path of the module.
pub(super) fn unit_of(tensor: &str) -> &str {
    let module = tensor.rsplit_once('.').map_or(tensor, |(module, _)| module);
    let mut end = module.len();
    loop {
        let begin = module[..end].rfind('.').map_or(0, |dot| dot + 1);
        if is_number(&module[begin..end]) {
            return &module[..end];
        }
        if begin == 0 {
            return module;
        }
        end = begin - 1;
    }
}

/// Compares names by their components, and numbers by value: `layers.2` comes before `layers.10`.
/// Numbers come before other components. This is a total order.
pub(super) fn compare(a: &str, b: &str) -> Ordering {
    let key = |component| match is_number(component) {
        true => {
            let digits = component.trim_start_matches('0');
            (0, digits.len(), digits)
        }
        false => (1, 0, component),
    };
    a.split('.').map(key).cmp(b.split('.').map(key)).then_with(|| (a.len(), a).cmp(&(b.len(), b)))
}

fn is_number(component: &str) -> bool {
    !component.is_empty() && component.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the name that is most like `wanted`, unless more than a third of it differs.
pub(super) fn nearest<'a>(
    wanted: &str,
    names: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let distances = names.into_iter().map(|name| (distance(wanted, name), name));
    let (distance, name) = distances.min()?;
    (3 * distance <= wanted.len().max(name.len())).then_some(name)
}

/// Returns how many bytes must be inserted, removed or replaced to get from `a` to `b`.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_the_innermost_numbered_modules() {
        for (tensor, unit) in [
            ("model.layers.3.self_attn.q_proj.weight", "model.layers.3"),
            ("model.layers.3.mlp.experts.12.w1.weight", "model.layers.3.mlp.experts.12"),
            ("model.embed_tokens.weight", "model.embed_tokens"),
            ("lm_head.weight", "lm_head"),
            ("weight", "weight"),
            ("0.weight", "0"),
            ("h.1", "h"), // the last component is the name of the tensor
            ("a..b", "a."),
        ] {
            assert_eq!(unit_of(tensor), unit, "{tensor}");
        }
    }

    #[test]
    fn numbers_are_compared_by_value() {
        let mut names = ["l.10", "l.2", "l.2.x", "k", "l", "l.02"];
        names.sort_by(|a, b| compare(a, b));
        assert_eq!(names, ["k", "l", "l.2", "l.02", "l.2.x", "l.10"]);
    }

    #[test]
    fn names_have_a_total_order() {
        let parts = ["2", "10", "1a", "02", "0", "", "b", "99999999999999999999", "9"];
        let two = parts.iter().flat_map(|a| parts.map(|b| format!("{a}.{b}")));
        let names: Vec<String> = parts.map(String::from).into_iter().chain(two).collect();
        for (a, b) in names.iter().flat_map(|a| names.iter().map(move |b| (a, b))) {
            assert_eq!(compare(a, b), compare(b, a).reverse());
            assert_eq!(compare(a, b).is_eq(), a == b);
            for c in names.iter().filter(|c| compare(a, b).is_lt() && compare(b, c).is_lt()) {
                assert!(compare(a, c).is_lt(), "{a} < {b} < {c}");
            }
        }
    }

    #[test]
    fn the_most_similar_name_is_suggested() {
        let names = ["model.layers.3", "model.norm", "lm_head"];
        assert_eq!(nearest("model.layer.3", names), Some("model.layers.3"));
        assert_eq!(nearest("head", names), None);
        assert_eq!(nearest("anything", []), None);
        assert_eq!((distance("", "abc"), distance("kitten", "sitting")), (3, 3));
    }
}
