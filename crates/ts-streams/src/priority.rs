// SPDX-License-Identifier: MIT OR Apache-2.0

/// The priority of a stream relative to the other streams of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StreamPriority {
    /// The highest priority of the device.
    High,
    /// The level halfway between the lowest and the highest priority, rounded towards the lowest.
    #[default]
    Normal,
    /// The lowest priority of the device.
    Low,
    /// An explicit level, numbered as in CUDA: smaller is more urgent. Levels outside the range of
    /// the device are clamped.
    Level(i32),
}

/// The range of priority levels of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PriorityRange {
    /// The least urgent level, which is the largest number.
    pub least: i32,
    /// The most urgent level, which is the smallest number.
    pub greatest: i32,
}

impl PriorityRange {
    /// Converts a priority to a level in this range. Clamps [`StreamPriority::Level`].
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
    fn priorities_map_to_device_levels() {
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
