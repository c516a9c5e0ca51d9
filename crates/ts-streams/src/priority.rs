// SPDX-License-Identifier: MIT OR Apache-2.0

/// How urgent the work of a stream is, beside that of other streams of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StreamPriority {
    /// The most urgent that the device knows.
    High,
    /// In between.
    #[default]
    Normal,
    /// The least urgent that it knows.
    Low,
    /// A level of the device's own, the smaller the more urgent, as CUDA counts; brought into its
    /// range.
    Level(i32),
}

/// The levels of urgency that a device tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PriorityRange {
    /// The least urgent level: the greatest number.
    pub least: i32,
    /// The most urgent level: the smallest number.
    pub greatest: i32,
}

impl PriorityRange {
    /// The level that a priority is on this device.
    pub fn level(self, priority: StreamPriority) -> i32 {
        let Self { least, greatest } = self;
        match priority {
            StreamPriority::High => greatest,
            StreamPriority::Normal => least - (least - greatest) / 2,
            StreamPriority::Low => least,
            StreamPriority::Level(level) => level.clamp(greatest.min(least), least.max(greatest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_are_levels_of_the_device() {
        let range = PriorityRange { least: 0, greatest: -5 };
        let levels = [StreamPriority::High, StreamPriority::Normal, StreamPriority::Low]
            .map(|p| range.level(p));
        assert_eq!(levels, [-5, -2, 0]);
        assert_eq!(range.level(StreamPriority::Level(-9)), -5);
        assert_eq!(range.level(StreamPriority::Level(3)), 0);
        assert_eq!(range.level(StreamPriority::Level(-3)), -3);
        let only = PriorityRange { least: 0, greatest: 0 };
        assert_eq!(only.level(StreamPriority::High), 0);
    }
}
