// SPDX-License-Identifier: MIT OR Apache-2.0
//! Passwords in URLs, which no message may contain.

use std::borrow::Cow;

/// Replaces the passwords of URLs in a text by `***`, for messages.
///
/// ```
/// let text = "http://user:secret@host/file: cannot open";
/// assert_eq!(ts_io::hide_passwords(text), "http://user:***@host/file: cannot open");
/// ```
pub fn hide_passwords(text: &str) -> Cow<'_, str> {
    let (mut shown, mut rest) = (String::new(), text);
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + "://".len());
        shown.push_str(before);
        let is_end = |letter: char| letter.is_whitespace() || "/?#\"'`".contains(letter);
        let (authority, left) = after.split_at(after.find(is_end).unwrap_or(after.len()));
        let user = authority
            .rsplit_once('@')
            .and_then(|(user, host)| user.split_once(':').map(|(user, _password)| (user, host)));
        match user {
            Some((user, host)) => shown.extend([user, ":***@", host]),
            None => shown.push_str(authority),
        }
        rest = left;
    }
    if shown.is_empty() {
        return text.into();
    }
    shown.push_str(rest);
    shown.into()
}
