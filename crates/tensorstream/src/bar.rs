// SPDX-License-Identifier: MIT OR Apache-2.0
//! Progress bars.

use indicatif::{ProgressBar, ProgressStyle};

use crate::Progress;

/// A progress bar on standard error. Shows nothing if standard error is not a terminal. Dropping
/// the bar removes it from the terminal.
///
/// ```
/// use tensorstream::{Bar, Progress};
///
/// let bar = Bar::new("copying");
/// bar.show(Progress { done: 1 << 20, total: 4 << 20 });
/// ```
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// Creates a bar with a label.
    pub fn new(label: impl Into<String>) -> Self {
        let bar = ProgressBar::new(0).with_message(label.into());
        let template =
            "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
        bar.set_style(
            ProgressStyle::with_template(template).expect("the template has valid syntax"),
        );
        Self { bar }
    }

    /// Creates a bar that shows nothing.
    pub fn hidden() -> Self {
        Self { bar: ProgressBar::hidden() }
    }

    /// Updates the position and the total of the bar.
    pub fn show(&self, progress: Progress) {
        self.bar.set_length(progress.total);
        self.bar.set_position(progress.done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
